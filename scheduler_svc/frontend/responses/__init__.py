"""`POST /v1/responses`: a chat in other words. The request becomes one of a chat, the chat's answer a response."""
