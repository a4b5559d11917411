"""Groups -> batch -> forest -> plan -> packed batch. numpy only."""
