"""The conformance suite: certifies that a declaration, its plugin and the runtime fit.

The parent judges and never imports the plugin: it makes the fill and the expectation, and compares.  A child
process executes.  See `kvc_conformance.runner`.
"""
