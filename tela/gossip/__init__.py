"""Dissemination, anti-entropy and failure detection over long-lived streams (design/registry.md 2.5 to 2.7)."""
