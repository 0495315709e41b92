"""Settings of axolotl, TRL, verl and OpenRLHF, and the options of rlpipe that they become in ``rlpipe import``.

The way of a file, in the order of the modules:

1. ``foreign_file`` opens it and reads YAML. A shell script's statements (``shell_words``) are followed with their
   variables (``shell_variables``, ``shell_script``), and ``launch_command`` finds the one that trains. ``trl_script``
   reads Python. All make a ``ForeignRun`` (``foreign_run``): the system, the method and the settings.
2. ``foreign_values`` looks settings up, with the defaults of ``system_defaults``, and computes the batch of a step.
3. ``training_table``, ``model_table``, ``loss_table`` and ``correction_table`` have a row for each option, with its
   names in the systems and its rule (``setting_rules``); ``setting_names`` finds the row of a name.
   ``data_set_entries`` reads data sets.
4. ``rlpipe.configs.translation`` applies the rules, drops what no config can have, and prints the config.

``setting_names`` also tells what to write where a config of rlpipe has another system's option.
"""
