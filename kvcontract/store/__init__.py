"""The three verbs: resolve, seal, retire."""
