"""What runs inside an engine: SGLang's server with our loader, and the embedded engine."""
