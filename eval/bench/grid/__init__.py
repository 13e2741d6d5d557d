"""What `ellm-sgl bench regret` simulates: machines, loads, and what policies are held against."""
