"""The cache variants, coda and shard, on grouped-query layers and on V4's."""
