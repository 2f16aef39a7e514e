"""`gilir chat`."""
