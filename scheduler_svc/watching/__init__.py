"""What the live page is told of the core: the newest iterations, noted only while somebody looks."""
