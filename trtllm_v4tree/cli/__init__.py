"""The `v4tree` command line. Nothing imports this package."""
