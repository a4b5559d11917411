"""Token log-probs: log softmax of hidden @ lm_head^T at given targets, without [T, V] logits."""
