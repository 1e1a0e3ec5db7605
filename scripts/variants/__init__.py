"""What each way to remember keeps and costs, measured on two models; see `scripts.kv_variants`."""
