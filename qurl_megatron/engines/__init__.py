"""The engine's side of rollouts: SGLang's server with our loader, and the embedded engine."""
