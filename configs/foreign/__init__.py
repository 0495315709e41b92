"""Configs of axolotl, TRL, verl and OpenRLHF as configs of rlpipe: what ``rlpipe import`` does.

The way of a file, in the order of the modules:

1. ``foreign_file`` opens it and reads YAML. ``shell_scanner``, ``shell_variables`` and ``shell_script`` list the
   commands of a shell script, ``launch_command`` finds the one that trains. ``trl_script`` reads Python. All make a
   ``ForeignRun`` (``foreign_run``): the system, the method and the settings.
2. ``foreign_values`` looks settings up, with the defaults of ``system_defaults``, and computes the batch of a step.
3. ``setting_rules`` and ``loss_rules`` say what a setting becomes; ``hf_settings``, ``axolotl_settings``,
   ``verl_settings`` and ``openrlhf_settings`` which rule a name has. ``data_set_entries`` does the same for data sets.
4. ``translation`` applies the rules, drops what no config can have, and prints the config.

``foreign_names`` is what an option that does not exist is compared with, in any config.
"""
