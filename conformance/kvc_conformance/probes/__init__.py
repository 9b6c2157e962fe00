"""What a child executes: thin calls of the public API, no judgement."""
