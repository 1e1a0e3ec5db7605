"""Parts of commands: what two share, and what is an idea of its own; most import torch, and are imported late."""
