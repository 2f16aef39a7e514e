"""What every HTTP service here shares: reading bodies and their fields, errors in OpenAI's shape, the server."""
