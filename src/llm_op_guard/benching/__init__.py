"""The program behind `llm-op-guard bench`: what guards cost, and what else would cost; docs/benchmarks.md."""
