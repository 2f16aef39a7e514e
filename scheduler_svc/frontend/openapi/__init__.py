"""The API's own description, OpenAPI 3.1, made of the ranges and names that the code checks."""
