"""Proof that guards catch what they are for: valid calls, calls that break one rule, and what either comes to."""
