"""Pictures: schedules that move, and what runs did when. Sees collectives, results and traces, never a run itself."""
