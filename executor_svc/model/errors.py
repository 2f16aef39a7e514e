"""The one error of this folder."""


class ModelError(Exception):
    """A model cannot be loaded. Its text is one plain line that names the file and the field or tensor."""
