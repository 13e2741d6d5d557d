"""Attention over the paged pool. `reference` is the definition; the others must agree with it."""
