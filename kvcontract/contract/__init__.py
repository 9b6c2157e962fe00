"""What a plugin says: declarations, clauses, hooks; pydantic, pluggy and typing, nothing else."""
