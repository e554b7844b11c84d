"""The mesh: encrypted links between nodes, streams over them, and who may join."""
