"""API keys of the REST API: what one is, the file that holds them, and the command that writes it."""

from scheduler_svc.keys.api_key import ANYBODY, ApiKey, fingerprint_of, new_secret, operators_key
from scheduler_svc.keys.key_file import KeyFileError, add_key, read_keys, remove_key

__all__ = [
    "ANYBODY",
    "ApiKey",
    "KeyFileError",
    "add_key",
    "fingerprint_of",
    "new_secret",
    "operators_key",
    "read_keys",
    "remove_key",
]
