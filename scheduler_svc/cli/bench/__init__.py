"""`gilir bench`: puts load on a server of the OpenAI API, and tells what its clients see."""
