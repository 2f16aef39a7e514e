"""OpenAI's Files and Batches: kept in a database, run at the lowest class by a process of their own. docs/batches.md"""
