"""A small continuous-batching engine that runs a real model over the arenas."""
