"""`kvc new-model`: the sources of a plugin package, filled in from a config.json where there is one."""
