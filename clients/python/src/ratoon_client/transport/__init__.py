"""The two wires, behind one interface that speaks messages."""
