/* scenarios.h -- all of them; each file says what it is about. */
#ifndef SCENARIOS_H
#define SCENARIOS_H
#include "explorer.h"

extern const struct ex_scenario scenario_kernel_message, scenario_kernel_pin, scenario_kernel_pin_two;
extern const struct ex_scenario scenario_ownership, scenario_recoverers;
extern const struct ex_scenario scenario_log_lapped, scenario_log_crash, scenario_insert, scenario_insert_crash;
extern const struct ex_scenario scenario_pin, scenario_pin_after, scenario_pin_batch, scenario_pin_own, scenario_copy, scenario_copy_after;
extern const struct ex_scenario scenario_publish, scenario_follow_crash, scenario_publish_crash, scenario_joining, scenario_lapped, scenario_removal, scenario_remove_race;
extern const struct ex_scenario scenario_giving, scenario_giving_pinned, scenario_revoking, scenario_giver_crash, scenario_taker_crash;
extern const struct ex_scenario scenario_adopt, scenario_adopt_read, scenario_adopt_crash, scenario_lost_reader, scenario_reborn;
extern const struct ex_scenario scenario_arguments, scenario_pin_all, scenario_lru, scenario_fifo, scenario_lfu, scenario_leaf;
extern const struct ex_scenario scenario_damage, scenario_open_damaged, scenario_plan;
extern const struct ex_scenario scenario_making, scenario_removing, scenario_remove_used, scenario_remove_silent, scenario_remaking,
    scenario_two_makers, scenario_late_maker, scenario_maker_lost;
extern const struct ex_scenario scenario_returning, scenario_cut_off, scenario_asked;
extern const struct ex_scenario scenario_class_lost, scenario_class_moved, scenario_class_race, scenario_class_border, scenario_class_unpinned, scenario_class_reserved, scenario_class_free;
extern const struct ex_scenario scenario_by_reference, scenario_by_copy, scenario_put_same, scenario_kept, scenario_crowded;
extern const struct ex_scenario scenario_watch_events, scenario_watch_local, scenario_watch_remote;
extern const struct ex_scenario scenario_pin_refused, scenario_pin_idle, scenario_pin_crash, scenario_evict_crash;
extern const struct ex_scenario scenario_join_worker, scenario_catch_up, scenario_remove_pinned;
extern const struct ex_scenario scenario_giving_beside, scenario_giving_late, scenario_giving_busy, scenario_giving_withdrawn, scenario_giving_inherited, scenario_giving_used, scenario_wanting;
extern const struct ex_scenario scenario_reader_reborn, scenario_class_lost_two, scenario_view, scenario_reader_back, scenario_busy_reborn, scenario_reader_fenced, scenario_reborn_read, scenario_adopt_return, scenario_giver_reborn, scenario_taker_reborn;
extern const struct ex_scenario scenario_zombie, scenario_beat, scenario_second_claim, scenario_two_claims, scenario_moving;
extern const struct ex_scenario scenario_twice_reborn, scenario_adopter_lost, scenario_adopter_reborn, scenario_adopter_fenced, scenario_take_only_crash, scenario_giving_recovered, scenario_giving_duplicate;
extern const struct ex_scenario scenario_remove_reuse, scenario_log_wrapped;
extern const struct ex_scenario scenario_offer_adopted, scenario_offer_crash, scenario_offer_revoked;

#endif
