"""The request path: from a client's HTTP request to a member's gate and back."""
