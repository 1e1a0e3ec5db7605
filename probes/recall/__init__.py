"""The lightning indexer's selection against two oracles."""
