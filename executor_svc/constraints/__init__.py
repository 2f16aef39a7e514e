"""What bounds the tokens of sequences: compiled grammars, how far each sequence has followed its own, and the masks."""

from executor_svc.constraints.constraints import Constraints, Masks

__all__ = ["Constraints", "Masks"]
