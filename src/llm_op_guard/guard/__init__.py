"""Contract → check: planning, generating, explaining."""
