"""A checkpoint's files: headers, names, census, what is stored, config.json."""
