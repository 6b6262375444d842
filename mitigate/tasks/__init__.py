"""Token-exact retrieval prompts under both padding protocols."""
