"""For authors of policies: the conformance kit, and states to try a policy on."""
