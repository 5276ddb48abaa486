"""The stages and backends that there are."""
