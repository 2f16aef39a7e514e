"""Files and batches as they are kept, in SQLite or PostgreSQL: no HTTP here, and no running. docs/batches.md"""
