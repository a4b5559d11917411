"""Tree attention: causal attention along every root-to-leaf path of a packed forest."""
