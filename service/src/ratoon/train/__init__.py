"""Loss, step and checkpoint of one policy on one worker."""
