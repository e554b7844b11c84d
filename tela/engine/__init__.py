"""The wrapped engine: its command, its life under the guard, its readiness, and the gate before it."""
