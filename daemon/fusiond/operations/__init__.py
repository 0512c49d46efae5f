"""Operations under way on one node, and their outcomes."""
