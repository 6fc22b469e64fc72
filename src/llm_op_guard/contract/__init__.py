"""Text ⇄ Contract: reading, checking and printing contracts. Never imports torch."""
