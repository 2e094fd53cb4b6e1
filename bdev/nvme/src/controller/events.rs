//! Handles asynchronous events: reports each event, and reads its log page, which clears the event
//! so that the controller can send the next one of that type.

use std::sync::Arc;

use nacre_nvmf_wire::aen::{AsyncEvent, event_type};
use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::identify::nsid;
use nacre_nvmf_wire::log::lid;
use nacre_reactor::CoreHandle;

use crate::admin::EVENTS_MAX;
use crate::controller::Controller;
use crate::event::Event;
use crate::link::count;

/// Bytes to read of a log page whose contents are not used, to clear its event.
const ENOUGH: usize = 512;

impl Controller {
    /// Sends Asynchronous Event Requests up to the controller's limit (AERL).
    pub(super) fn request_events(&self) {
        let count = (u16::from(self.shared.properties().aerl) + 1).min(EVENTS_MAX);
        self.admin.request_events(count);
    }

    pub(super) async fn serve_events(self: Arc<Self>, core: CoreHandle) {
        loop {
            self.admin.news.notified().await;
            if self.shared.is_detached() {
                return;
            }
            for event in self.admin.take_events() {
                count(&self.shared.counters.events);
                self.send_event(Event::AsyncEvent(event));
                self.serve_event(&core, event).await;
            }
            if self.shared.is_live() {
                self.request_events();
            }
        }
    }

    async fn serve_event(self: &Arc<Self>, core: &CoreHandle, event: AsyncEvent) {
        tracing::info!(
            controller = self.name(),
            event_type = event.event_type,
            info = event.info,
            log_page = event.log_page,
            "NVMe asynchronous event"
        );
        match (event.event_type, event.log_page) {
            (event_type::SMART_HEALTH, _) => self.check_health(core).await,
            (event_type::NOTICE, lid::CHANGED_NAMESPACE_LIST) => {
                // Read the page only to clear the event.
                self.clear(core, event.log_page, 4096).await;
                let _one = self.lifecycle.lock().await;
                if !self.shared.is_live() {
                    return;
                }
                if let Err(error) = self.find_namespaces(core).await {
                    tracing::error!(controller = self.name(), %error, "NVMe namespaces not read");
                }
            }
            (_, 0) => {}
            (_, log_page) => self.clear(core, log_page, ENOUGH).await,
        }
    }

    async fn clear(self: &Arc<Self>, core: &CoreHandle, log_page: u8, bytes: usize) {
        let mut page = vec![0; bytes];
        let sqe = GetLogPage::new(log_page, bytes as u32, 0).to_sqe(0, nsid::BROADCAST);
        let answer = self.commands(core).ask(sqe, &[], &mut page).await;
        self.handle_outcome(core, answer.map(|_| ())).await;
    }
}
