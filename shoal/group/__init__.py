"""Ranks that communicate."""
