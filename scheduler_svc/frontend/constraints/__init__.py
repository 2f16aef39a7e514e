"""What a request allows its answer to be: read, checked, and made into the constraint that goes with its sequences."""
