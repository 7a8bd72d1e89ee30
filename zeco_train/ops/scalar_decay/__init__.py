"""Linear attention with one decay per head. Placeholder: the operator itself is another branch's."""
