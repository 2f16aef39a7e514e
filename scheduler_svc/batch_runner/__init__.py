"""The process that runs the lines of batches, as a client of the core that takes its requests from the database."""
