"""How attention is spread over several devices: batch and heads stay where they are, nothing is gathered."""
