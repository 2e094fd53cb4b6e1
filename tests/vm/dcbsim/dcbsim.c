// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * dcbsim: a pair of Ethernet devices with DCB, for tests only.
 *
 * dcb0 and dcb1 are the two ends of one cable. Each keeps its own DCB and pause settings in memory
 * and counts frames by priority, as a card does: the sender by its own tables, the receiver by its
 * own. Nothing pauses and nothing is scheduled.
 *
 * /sys/kernel/debug/dcbsim/DEVICE/
 *   set      "NAME VALUE" sets a counter of `ethtool -S`
 *   refuse   bits of setting kinds that fail with EBUSY, see enum refuse
 *   drop     one of so many received frames is lost for want of a buffer; 0: none
 *   lossy    the priorities that `drop` is about, a bit each; 0: all
 *   largest  longer received frames are lost, as at a switch port with a smaller MTU; 0: none
 *   trust    the selectors in the order of trust
 *   rewrite  the DSCP of received frames becomes 0, as behind a router without trust
 */
#include <linux/debugfs.h>
#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/if_vlan.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/module.h>
#include <linux/rtnetlink.h>
#include <linux/seq_file.h>
#include <net/dcbnl.h>
#include <net/dsfield.h>
#include <net/inet_ecn.h>

#define PRIORITIES 8
#define CLASSES 8
/* Priorities that may be lossless at once. */
#define PFC_CAP 4
#define BUFFER_TOTAL (256 * 1024)

/* The kinds of settings that `refuse` selects. */
enum refuse {
	REFUSE_ETS = 1,
	REFUSE_PFC = 2,
	REFUSE_BUFFER = 4,
	REFUSE_APP = 8,
	REFUSE_TRUST = 16,
	REFUSE_DCBX = 32,
	REFUSE_PAUSE = 64,
};

/* The names of mlx5. */
static const char *const by_priority[] = {
	"bytes", "packets", "pause", "pause_duration", "discards",
};
enum field { BYTES, PACKETS, PAUSE, PAUSE_DURATION, DISCARDS, FIELDS };
enum direction { RX, TX, DIRECTIONS };
static const char *const directions[] = { "rx", "tx" };
static const char *const others[] = {
	"rx_discards_phy", "tx_pause_storm_warning_events", "rx_pause_ctrl_phy", "tx_pause_ctrl_phy",
};
enum other { RX_DISCARDS, STORMS, RX_PAUSE, TX_PAUSE, OTHERS };

#define COUNTERS (DIRECTIONS * PRIORITIES * FIELDS + OTHERS)
#define FIRST_OTHER (DIRECTIONS * PRIORITIES * FIELDS)

struct sim {
	struct net_device *dev;
	struct net_device *peer;
	struct dentry *dir;
	atomic64_t counters[COUNTERS];
	atomic_t received;
	u32 refuse;
	u32 drop;
	u32 lossy;
	u32 largest;
	bool rewrite;

	u8 dcbx;
	struct ieee_ets ets;
	struct ieee_pfc pfc;
	struct ieee_maxrate rate;
	struct dcbnl_buffer buffer;
	u8 trust[2];
	int trusted;
	struct ethtool_pauseparam pause;
};

static struct net_device *ends[2];

static int counter_of(enum direction direction, u8 priority, enum field field)
{
	return (direction * PRIORITIES + priority) * FIELDS + field;
}

static void counter_name(int index, char *name)
{
	if (index >= FIRST_OTHER)
		snprintf(name, ETH_GSTRING_LEN, "%s", others[index - FIRST_OTHER]);
	else
		snprintf(name, ETH_GSTRING_LEN, "%s_prio%d_%s",
			 directions[index / (PRIORITIES * FIELDS)], index / FIELDS % PRIORITIES,
			 by_priority[index % FIELDS]);
}

/* ---- frames ------------------------------------------------------------------------------- */

static int dscp_of(struct sk_buff *skb)
{
	switch (vlan_get_protocol(skb)) {
	case htons(ETH_P_IP):
		if (!pskb_may_pull(skb, ETH_HLEN + VLAN_HLEN + sizeof(struct iphdr)))
			break;
		return ipv4_get_dsfield((struct iphdr *)(skb->data + skb_network_offset(skb))) >> 2;
	case htons(ETH_P_IPV6):
		if (!pskb_may_pull(skb, ETH_HLEN + sizeof(struct ipv6hdr)))
			break;
		return ipv6_get_dsfield((struct ipv6hdr *)(skb->data + skb_network_offset(skb))) >> 2;
	}
	return -1;
}

/* The priority of a frame by the tables of `sim`. `skb->data` is the Ethernet header. */
static u8 priority_of(struct sim *sim, struct sk_buff *skb)
{
	int at, trusted = READ_ONCE(sim->trusted);
	u16 tag;

	for (at = 0; at < trusted; at++) {
		if (sim->trust[at] == DCB_APP_SEL_PCP && !vlan_get_tag(skb, &tag))
			return tag >> VLAN_PRIO_SHIFT;
		if (sim->trust[at] == IEEE_8021QAZ_APP_SEL_DSCP) {
			struct dcb_app app = { .selector = IEEE_8021QAZ_APP_SEL_DSCP };
			int dscp = dscp_of(skb);
			u8 mask;

			if (dscp < 0)
				continue;
			app.protocol = dscp;
			mask = dcb_ieee_getapp_mask(sim->dev, &app);
			return mask ? fls(mask) - 1 : dscp >> 3;
		}
	}
	return 0;
}

static void count(struct sim *sim, enum direction direction, u8 priority, unsigned int bytes)
{
	atomic64_add(bytes, &sim->counters[counter_of(direction, priority, BYTES)]);
	atomic64_inc(&sim->counters[counter_of(direction, priority, PACKETS)]);
}

static netdev_tx_t sim_xmit(struct sk_buff *skb, struct net_device *dev)
{
	struct sim *from = netdev_priv(dev), *to = netdev_priv(from->peer);
	unsigned int bytes = skb->len;
	u8 priority;

	count(from, TX, priority_of(from, skb), bytes);
	dev_sw_netstats_tx_add(dev, 1, bytes);
	priority = priority_of(to, skb);
	if (to->largest && bytes > to->largest) {
		dev_kfree_skb(skb);
		return NETDEV_TX_OK;
	}
	if (to->drop && (!to->lossy || to->lossy & BIT(priority)) &&
	    atomic_inc_return(&to->received) % to->drop == 0) {
		atomic64_inc(&to->counters[counter_of(RX, priority, DISCARDS)]);
		atomic64_inc(&to->counters[FIRST_OTHER + RX_DISCARDS]);
		dev_kfree_skb(skb);
		return NETDEV_TX_OK;
	}
	if (to->rewrite && skb->protocol == htons(ETH_P_IP) &&
	    !skb_ensure_writable(skb, ETH_HLEN + sizeof(struct iphdr))) {
		ipv4_change_dsfield(ip_hdr(skb), INET_ECN_MASK, 0);
		priority = priority_of(to, skb);
	}
	count(to, RX, priority, bytes);
	if (dev_forward_skb(from->peer, skb) == NET_RX_SUCCESS)
		dev_sw_netstats_rx_add(from->peer, bytes);
	return NETDEV_TX_OK;
}

static const struct net_device_ops sim_ops = {
	.ndo_start_xmit = sim_xmit,
	.ndo_validate_addr = eth_validate_addr,
	.ndo_set_mac_address = eth_mac_addr,
};

/* ---- DCB ---------------------------------------------------------------------------------- */

static bool refuses(struct net_device *dev, enum refuse kind)
{
	struct sim *sim = netdev_priv(dev);

	return sim->refuse & kind;
}

static int sim_getets(struct net_device *dev, struct ieee_ets *ets)
{
	struct sim *sim = netdev_priv(dev);

	*ets = sim->ets;
	return 0;
}

static int sim_setets(struct net_device *dev, struct ieee_ets *ets)
{
	struct sim *sim = netdev_priv(dev);
	int class, sum = 0;
	bool shares = false;

	if (refuses(dev, REFUSE_ETS))
		return -EBUSY;
	for (class = 0; class < CLASSES; class++) {
		if (ets->prio_tc[class] >= CLASSES)
			return -EINVAL;
		if (ets->tc_tsa[class] != IEEE_8021QAZ_TSA_ETS)
			continue;
		shares = true;
		sum += ets->tc_tx_bw[class];
	}
	if (shares && sum != 100)
		return -EINVAL;
	sim->ets = *ets;
	sim->ets.ets_cap = CLASSES;
	return 0;
}

static int sim_getpfc(struct net_device *dev, struct ieee_pfc *pfc)
{
	struct sim *sim = netdev_priv(dev);
	int priority;

	*pfc = sim->pfc;
	for (priority = 0; priority < PRIORITIES; priority++) {
		pfc->requests[priority] =
			atomic64_read(&sim->counters[counter_of(TX, priority, PAUSE)]);
		pfc->indications[priority] =
			atomic64_read(&sim->counters[counter_of(RX, priority, PAUSE)]);
	}
	return 0;
}

static int sim_setpfc(struct net_device *dev, struct ieee_pfc *pfc)
{
	struct sim *sim = netdev_priv(dev);

	if (refuses(dev, REFUSE_PFC))
		return -EBUSY;
	if (hweight8(pfc->pfc_en) > PFC_CAP)
		return -EINVAL;
	/* As a card: PFC and pause of the whole port exclude each other. */
	if (pfc->pfc_en && (sim->pause.rx_pause || sim->pause.tx_pause))
		return -EINVAL;
	sim->pfc = *pfc;
	sim->pfc.pfc_cap = PFC_CAP;
	return 0;
}

static int sim_getmaxrate(struct net_device *dev, struct ieee_maxrate *rate)
{
	struct sim *sim = netdev_priv(dev);

	*rate = sim->rate;
	return 0;
}

static int sim_setmaxrate(struct net_device *dev, struct ieee_maxrate *rate)
{
	struct sim *sim = netdev_priv(dev);

	sim->rate = *rate;
	return 0;
}

static int sim_getbuffer(struct net_device *dev, struct dcbnl_buffer *buffer)
{
	struct sim *sim = netdev_priv(dev);

	*buffer = sim->buffer;
	return 0;
}

static int sim_setbuffer(struct net_device *dev, struct dcbnl_buffer *buffer)
{
	struct sim *sim = netdev_priv(dev);
	u64 sum = 0;
	int at;

	if (refuses(dev, REFUSE_BUFFER))
		return -EBUSY;
	for (at = 0; at < DCBX_MAX_BUFFERS; at++)
		sum += buffer->buffer_size[at];
	if (sum > BUFFER_TOTAL)
		return -EINVAL;
	sim->buffer = *buffer;
	sim->buffer.total_size = BUFFER_TOTAL;
	return 0;
}

static int sim_setapp(struct net_device *dev, struct dcb_app *app)
{
	return refuses(dev, REFUSE_APP) ? -EBUSY : dcb_ieee_setapp(dev, app);
}

static int sim_delapp(struct net_device *dev, struct dcb_app *app)
{
	return refuses(dev, REFUSE_APP) ? -EBUSY : dcb_ieee_delapp(dev, app);
}

static int sim_getapptrust(struct net_device *dev, u8 *selectors, int *count)
{
	struct sim *sim = netdev_priv(dev);

	memcpy(selectors, sim->trust, sim->trusted);
	*count = sim->trusted;
	return 0;
}

static int sim_setapptrust(struct net_device *dev, u8 *selectors, int count)
{
	struct sim *sim = netdev_priv(dev);
	int at;

	if (refuses(dev, REFUSE_TRUST))
		return -EBUSY;
	if (count > ARRAY_SIZE(sim->trust))
		return -EOPNOTSUPP;
	for (at = 0; at < count; at++)
		if (selectors[at] != IEEE_8021QAZ_APP_SEL_DSCP && selectors[at] != DCB_APP_SEL_PCP)
			return -EOPNOTSUPP;
	memcpy(sim->trust, selectors, count);
	WRITE_ONCE(sim->trusted, count);
	return 0;
}

static u8 sim_getdcbx(struct net_device *dev)
{
	struct sim *sim = netdev_priv(dev);

	return sim->dcbx;
}

static u8 sim_setdcbx(struct net_device *dev, u8 mode)
{
	struct sim *sim = netdev_priv(dev);

	if (refuses(dev, REFUSE_DCBX))
		return 1;
	sim->dcbx = mode;
	return 0;
}

/* An agent in the firmware knows the settings of the other end. */
static struct sim *agents_peer(struct net_device *dev)
{
	struct sim *sim = netdev_priv(dev);

	return sim->dcbx & DCB_CAP_DCBX_LLD_MANAGED ? netdev_priv(sim->peer) : NULL;
}

static int sim_peer_getets(struct net_device *dev, struct ieee_ets *ets)
{
	struct sim *peer = agents_peer(dev);

	if (!peer)
		return -EOPNOTSUPP;
	*ets = peer->ets;
	return 0;
}

static int sim_peer_getpfc(struct net_device *dev, struct ieee_pfc *pfc)
{
	struct sim *peer = agents_peer(dev);

	if (!peer)
		return -EOPNOTSUPP;
	*pfc = peer->pfc;
	return 0;
}

static const struct dcbnl_rtnl_ops sim_dcb = {
	.ieee_getets = sim_getets,
	.ieee_setets = sim_setets,
	.ieee_getpfc = sim_getpfc,
	.ieee_setpfc = sim_setpfc,
	.ieee_getmaxrate = sim_getmaxrate,
	.ieee_setmaxrate = sim_setmaxrate,
	.ieee_setapp = sim_setapp,
	.ieee_delapp = sim_delapp,
	.ieee_peer_getets = sim_peer_getets,
	.ieee_peer_getpfc = sim_peer_getpfc,
	.getdcbx = sim_getdcbx,
	.setdcbx = sim_setdcbx,
	.dcbnl_getbuffer = sim_getbuffer,
	.dcbnl_setbuffer = sim_setbuffer,
	.dcbnl_setapptrust = sim_setapptrust,
	.dcbnl_getapptrust = sim_getapptrust,
};

/* ---- ethtool ------------------------------------------------------------------------------ */

static void sim_drvinfo(struct net_device *dev, struct ethtool_drvinfo *info)
{
	strscpy(info->driver, "dcbsim", sizeof(info->driver));
}

static int sim_sset_count(struct net_device *dev, int set)
{
	return set == ETH_SS_STATS ? COUNTERS : -EOPNOTSUPP;
}

static void sim_strings(struct net_device *dev, u32 set, u8 *data)
{
	int at;

	for (at = 0; at < COUNTERS; at++)
		counter_name(at, data + at * ETH_GSTRING_LEN);
}

static void sim_stats(struct net_device *dev, struct ethtool_stats *stats, u64 *data)
{
	struct sim *sim = netdev_priv(dev);
	int at;

	for (at = 0; at < COUNTERS; at++)
		data[at] = atomic64_read(&sim->counters[at]);
}

static void sim_getpause(struct net_device *dev, struct ethtool_pauseparam *pause)
{
	struct sim *sim = netdev_priv(dev);

	*pause = sim->pause;
}

static int sim_setpause(struct net_device *dev, struct ethtool_pauseparam *pause)
{
	struct sim *sim = netdev_priv(dev);

	if (refuses(dev, REFUSE_PAUSE))
		return -EBUSY;
	if (sim->pfc.pfc_en && (pause->rx_pause || pause->tx_pause))
		return -EINVAL;
	sim->pause = *pause;
	return 0;
}

static void sim_pause_stats(struct net_device *dev, struct ethtool_pause_stats *stats)
{
	struct sim *sim = netdev_priv(dev);

	stats->rx_pause_frames = atomic64_read(&sim->counters[FIRST_OTHER + RX_PAUSE]);
	stats->tx_pause_frames = atomic64_read(&sim->counters[FIRST_OTHER + TX_PAUSE]);
}

static int sim_link(struct net_device *dev, struct ethtool_link_ksettings *settings)
{
	settings->base.speed = SPEED_25000;
	settings->base.duplex = DUPLEX_FULL;
	settings->base.port = PORT_DA;
	return 0;
}

static const struct ethtool_ops sim_ethtool = {
	.get_drvinfo = sim_drvinfo,
	.get_link = ethtool_op_get_link,
	.get_link_ksettings = sim_link,
	.get_sset_count = sim_sset_count,
	.get_strings = sim_strings,
	.get_ethtool_stats = sim_stats,
	.get_pauseparam = sim_getpause,
	.set_pauseparam = sim_setpause,
	.get_pause_stats = sim_pause_stats,
};

/* ---- debugfs ------------------------------------------------------------------------------ */

static ssize_t set_write(struct file *file, const char __user *from, size_t length, loff_t *at)
{
	struct sim *sim = file->private_data;
	char line[64], wanted[ETH_GSTRING_LEN], name[ETH_GSTRING_LEN];
	unsigned long long value;
	int index;

	if (length >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, from, length))
		return -EFAULT;
	line[length] = 0;
	if (sscanf(line, "%31s %llu", wanted, &value) != 2)
		return -EINVAL;
	for (index = 0; index < COUNTERS; index++) {
		counter_name(index, name);
		if (strcmp(name, wanted))
			continue;
		atomic64_set(&sim->counters[index], value);
		return length;
	}
	return -ENOENT;
}

static const struct file_operations set_file = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = set_write,
};

static int trust_show(struct seq_file *file, void *unused)
{
	struct sim *sim = file->private;
	int at;

	for (at = 0; at < sim->trusted; at++)
		seq_printf(file, "%s%s", at ? " " : "",
			   sim->trust[at] == DCB_APP_SEL_PCP ? "pcp" : "dscp");
	seq_putc(file, '\n');
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(trust);

/* ---- the pair ----------------------------------------------------------------------------- */

static void sim_setup(struct net_device *dev)
{
	struct sim *sim = netdev_priv(dev);
	int at;

	ether_setup(dev);
	eth_hw_addr_random(dev);
	dev->netdev_ops = &sim_ops;
	dev->ethtool_ops = &sim_ethtool;
	dev->dcbnl_ops = &sim_dcb;
	dev->max_mtu = 9216;
	dev->pcpu_stat_type = NETDEV_PCPU_STAT_TSTATS;
	dev->needs_free_netdev = true;

	sim->dev = dev;
	sim->dcbx = DCB_CAP_DCBX_HOST | DCB_CAP_DCBX_VER_IEEE;
	sim->ets.ets_cap = CLASSES;
	sim->pfc.pfc_cap = PFC_CAP;
	sim->pfc.delay = 32768;
	sim->buffer.total_size = BUFFER_TOTAL;
	sim->buffer.buffer_size[0] = BUFFER_TOTAL / 2;
	sim->trust[0] = DCB_APP_SEL_PCP;
	sim->trusted = 1;
	for (at = 0; at < CLASSES; at++)
		sim->ets.tc_tsa[at] = IEEE_8021QAZ_TSA_STRICT;
}

static struct dentry *debug;

static void debug_add(struct sim *sim)
{
	sim->dir = debugfs_create_dir(sim->dev->name, debug);
	debugfs_create_file("set", 0200, sim->dir, sim, &set_file);
	debugfs_create_file("trust", 0400, sim->dir, sim, &trust_fops);
	debugfs_create_u32("refuse", 0600, sim->dir, &sim->refuse);
	debugfs_create_u32("drop", 0600, sim->dir, &sim->drop);
	debugfs_create_u32("lossy", 0600, sim->dir, &sim->lossy);
	debugfs_create_u32("largest", 0600, sim->dir, &sim->largest);
	debugfs_create_bool("rewrite", 0600, sim->dir, &sim->rewrite);
}

static int __init sim_init(void)
{
	int at, error = -ENOMEM;

	for (at = 0; at < 2; at++) {
		ends[at] = alloc_netdev(sizeof(struct sim), at ? "dcb1" : "dcb0", NET_NAME_USER, sim_setup);
		if (!ends[at])
			goto free;
	}
	for (at = 0; at < 2; at++)
		((struct sim *)netdev_priv(ends[at]))->peer = ends[1 - at];
	rtnl_lock();
	error = register_netdevice(ends[0]);
	if (!error) {
		error = register_netdevice(ends[1]);
		if (error)
			unregister_netdevice(ends[0]);
	}
	rtnl_unlock();
	if (error) {
		/* A device that was registered is freed with its registration. */
		if (ends[0]->reg_state == NETREG_UNINITIALIZED)
			free_netdev(ends[0]);
		free_netdev(ends[1]);
		return error;
	}
	debug = debugfs_create_dir("dcbsim", NULL);
	for (at = 0; at < 2; at++)
		debug_add(netdev_priv(ends[at]));
	return 0;
free:
	for (at = 0; at < 2; at++)
		if (ends[at])
			free_netdev(ends[at]);
	return error;
}

static void __exit sim_exit(void)
{
	LIST_HEAD(both);

	debugfs_remove_recursive(debug);
	rtnl_lock();
	/* Both at once: a frame on its way needs the other end. */
	unregister_netdevice_queue(ends[0], &both);
	unregister_netdevice_queue(ends[1], &both);
	unregister_netdevice_many(&both);
	rtnl_unlock();
}

module_init(sim_init);
module_exit(sim_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("A pair of Ethernet devices with DCB, for tests");
