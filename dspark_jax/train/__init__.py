"""Training a draft against a frozen target (SPEC section 6)."""
