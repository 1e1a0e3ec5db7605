"""KV-compression methods: CoDA and Shard, and how a layer with grouped heads remembers."""
